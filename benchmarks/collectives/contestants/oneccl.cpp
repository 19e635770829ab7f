// oneCCL behind a C interface that ctypes can call. float32, SUM, host memory; every call returns when it is done.
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>

#include "oneapi/ccl.hpp"

namespace {

ccl::shared_ptr_class<ccl::kvs> store;
std::unique_ptr<ccl::communicator> world;

// No exception may cross into Python: print it, return 1.
template <typename Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "oneCCL: %s\n", error.what());
        return 1;
    }
}

}  // namespace

extern "C" {

size_t address_bytes() { return ccl::kvs::address_max_size; }

// Rank 0 calls this and hands `address` to the others.
int create_address(void* address) {
    return guarded([&] {
        ccl::init();
        store = ccl::create_main_kvs();
        const auto own = store->get_address();
        std::memcpy(address, own.data(), own.size());
    });
}

int connect(int rank, int world_size, const void* address) {
    return guarded([&] {
        if (rank != 0) {
            ccl::init();
            ccl::kvs::address_type given;
            std::memcpy(given.data(), address, given.size());
            store = ccl::create_kvs(given);
        }
        world = std::make_unique<ccl::communicator>(ccl::create_communicator(world_size, rank, store));
    });
}

int all_reduce(const float* source, float* target, size_t count) {
    return guarded([&] { ccl::allreduce(source, target, count, ccl::reduction::sum, *world).wait(); });
}

int all_gather(const float* source, float* target, size_t count) {
    return guarded([&] { ccl::allgather(source, target, count, ccl::datatype::float32, *world).wait(); });
}

int reduce_scatter(const float* source, float* target, size_t count) {
    return guarded([&] { ccl::reduce_scatter(source, target, count, ccl::reduction::sum, *world).wait(); });
}

int all_to_all(const float* source, float* target, size_t count) {
    return guarded([&] { ccl::alltoall(source, target, count, *world).wait(); });
}

int broadcast(float* buffer, size_t count, int root) {
    return guarded([&] { ccl::broadcast(buffer, count, root, *world).wait(); });
}

int barrier() {
    return guarded([&] { ccl::barrier(*world); });
}

void disconnect() {
    world.reset();
    store.reset();
}
}
