// A simulated accelerator for PyTorch's PrivateUse1: for tests of code that must never touch a device's memory itself.
//
// Its memory is one anonymous file, mapped twice: tensors know the mapping that nobody may read or write, so whatever
// takes their address for the host's dies of SIGSEGV; the device itself uses the other one. A stream is a thread.
// Copies are queued on the current stream and carried out later, unless they must block; kernels are the CPU's, carried
// out after all that is queued on the current stream. What is not ordered by streams and events races, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr size_t kArena = size_t(8) << 30;  // addresses; what nobody uses has no pages
constexpr size_t kLine = 512;

struct Arena {
    char *device = nullptr, *host = nullptr;
    size_t end = 0, used = 0, limit = kArena;
    std::map<size_t, std::vector<size_t>> free;
    std::mutex lock;

    Arena() {
        int fd = memfd_create("simulated-accelerator", 0);
        TORCH_CHECK(fd >= 0 && ftruncate(fd, kArena) == 0, "simulated accelerator: no memory");
        device = static_cast<char *>(mmap(nullptr, kArena, PROT_NONE, MAP_SHARED, fd, 0));
        host = static_cast<char *>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        TORCH_CHECK(device != MAP_FAILED && host != MAP_FAILED, "simulated accelerator: no addresses");
        close(fd);
        if (const char *text = std::getenv("SIMULATED_ACCELERATOR_BYTES")) limit = std::strtoull(text, nullptr, 10);
    }
    char *allocate(size_t nbytes) {
        std::lock_guard<std::mutex> guard(lock);
        TORCH_CHECK_WITH(OutOfMemoryError, used + nbytes <= limit, "simulated accelerator: out of memory. Tried to allocate ",
                         nbytes, " bytes; ", limit - used, " bytes are free.");
        auto &blocks = free[nbytes];
        size_t at = end;
        if (!blocks.empty()) {
            at = blocks.back();
            blocks.pop_back();
        } else {
            TORCH_CHECK(end + nbytes <= kArena, "simulated accelerator: out of addresses");
            end += nbytes;
        }
        used += nbytes;
        return device + at;
    }
    void release(char *at, size_t nbytes) {
        std::lock_guard<std::mutex> guard(lock);
        used -= nbytes;
        free[nbytes].push_back(at - device);
    }
    char *to_host(const void *at) { return host + (static_cast<const char *>(at) - device); }
};
Arena &arena() {
    static auto *one = new Arena;  // never destroyed: threads may still use it when the process ends
    return *one;
}

struct Block {
    char *at;
    size_t nbytes;
};
thread_local c10::DeviceIndex current_device = 0;

struct SimAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        c10::Device device(kSim, current_device);
        if (nbytes == 0) return {nullptr, nullptr, &drop, device};
        size_t rounded = (nbytes + kLine - 1) / kLine * kLine;
        auto *block = new Block{arena().allocate(rounded), rounded};
        return {block->at, block, &drop, device};
    }
    static void drop(void *context) {
        if (auto *block = static_cast<Block *>(context)) {
            arena().release(block->at, block->nbytes);
            delete block;
        }
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void *to, const void *from, std::size_t nbytes) const override {
        std::memcpy(arena().to_host(to), arena().to_host(from), nbytes);
    }
};
SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// -- streams and events ----------------------------------------------------------------------------------------------

struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queued;
    bool busy = false;

    Stream() {
        std::thread([this] {
            for (;;) {
                std::function<void()> action;
                {
                    std::unique_lock<std::mutex> guard(lock);
                    changed.wait(guard, [this] { return !queued.empty(); });
                    action = std::move(queued.front());
                    queued.pop_front();
                    busy = true;
                }
                action();
                action = nullptr;
                std::lock_guard<std::mutex> guard(lock);
                busy = false;
                changed.notify_all();
            }
        }).detach();
    }
    void put(std::function<void()> action) {
        std::lock_guard<std::mutex> guard(lock);
        queued.push_back(std::move(action));
        changed.notify_all();
    }
    bool idle() {
        std::lock_guard<std::mutex> guard(lock);
        return queued.empty() && !busy;
    }
    void synchronize() {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return queued.empty() && !busy; });
    }
};

struct Streams {
    std::mutex lock;
    std::vector<std::unique_ptr<Stream>> all;
    Stream &of(c10::StreamId id) {
        std::lock_guard<std::mutex> guard(lock);
        while (all.size() <= size_t(id)) all.push_back(std::make_unique<Stream>());
        return *all[id];
    }
    c10::StreamId add() {
        std::lock_guard<std::mutex> guard(lock);
        if (all.empty()) all.push_back(std::make_unique<Stream>());  // 0 is the default stream
        all.push_back(std::make_unique<Stream>());
        return c10::StreamId(all.size() - 1);
    }
};
Streams &streams() {
    static auto *one = new Streams;
    return *one;
}
thread_local c10::StreamId current_stream = 0;
Stream &current() { return streams().of(current_stream); }

struct Mark {
    std::mutex lock;
    std::condition_variable changed;
    bool reached = false;
    void reach() {
        std::lock_guard<std::mutex> guard(lock);
        reached = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return reached; });
    }
    bool is_reached() {
        std::lock_guard<std::mutex> guard(lock);
        return reached;
    }
};
using Event = std::shared_ptr<Mark>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    Guard() = default;
    explicit Guard(c10::DeviceType) {}
    c10::DeviceType type() const override { return kSim; }
    c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device before(kSim, current_device);
        current_device = device.has_index() ? device.index() : current_device;
        return before;
    }
    c10::Device getDevice() const override { return {kSim, current_device}; }
    void setDevice(c10::Device device) const override { exchangeDevice(device); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::Stream stream_of(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, 0), id); }
    c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
    c10::Stream getNewStream(c10::Device, int) const override { return stream_of(streams().add()); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
        thread_local c10::StreamId mine = streams().add();
        return stream_of(mine);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto before = stream_of(current_stream);
        current_stream = stream.id();
        return before;
    }
    bool queryStream(const c10::Stream &stream) const override { return streams().of(stream.id()).idle(); }
    void synchronizeStream(const c10::Stream &stream) const override { streams().of(stream.id()).synchronize(); }
    void synchronizeDevice(c10::DeviceIndex) const override {
        for (size_t i = 0;; i++) {
            {
                std::lock_guard<std::mutex> guard(streams().lock);
                if (i >= streams().all.size()) return;
            }
            streams().of(c10::StreamId(i)).synchronize();
        }
    }
    void record(void **event, const c10::Stream &stream, c10::DeviceIndex, c10::EventFlag) const override {
        if (!*event) *event = new Event;
        auto mark = std::make_shared<Mark>();
        *static_cast<Event *>(*event) = mark;
        streams().of(stream.id()).put([mark] { mark->reach(); });
    }
    void block(void *event, const c10::Stream &stream) const override {
        if (!event) return;
        Event mark = *static_cast<Event *>(event);
        streams().of(stream.id()).put([mark] { mark->wait(); });
    }
    bool queryEvent(void *event) const override { return !event || (*static_cast<Event *>(event))->is_reached(); }
    void synchronizeEvent(void *event) const override {
        if (event) (*static_cast<Event *>(event))->wait();
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override { delete static_cast<Event *>(event); }
    void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        auto before = current_device;
        current_device = device;
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    at::Device getDeviceFromPtr(void *) const override { return {kSim, 0}; }
    bool isPinnedPtr(const void *) const override { return false; }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t nbytes) const override {
        auto fresh = allocator.allocate(nbytes);
        size_t both = std::min(nbytes, storage.nbytes());
        current().synchronize();
        if (both) allocator.copy_data(fresh.get(), storage.data(), both);
        storage.set_data_ptr_noswap(std::move(fresh));
        storage.set_nbytes(nbytes);
    }
};
const bool hooked = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

// -- operators ---------------------------------------------------------------------------------------------------------

at::Tensor as_host(const at::Tensor &tensor) {
    if (!tensor.is_privateuseone()) return tensor.detach();
    auto *at = tensor.numel() ? arena().to_host(tensor.const_data_ptr()) : nullptr;
    auto host = at::from_blob(at, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    host._set_conj(tensor.is_conj());
    host._set_neg(tensor.is_neg());
    return host;
}

at::Tensor copy_from(const at::Tensor &self, const at::Tensor &dst, bool non_blocking) {
    auto copy = [self, dst] {
        at::NoGradGuard no_grad;
        if (dst.numel()) as_host(dst).copy_(as_host(self));
    };
    current().put(copy);
    if (!non_blocking) current().synchronize();
    return dst;
}

const at::Tensor &resize_sim(const at::Tensor &self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    size_t needed = (impl->storage_offset() + impl->numel()) * impl->dtype().itemsize();
    if (impl->numel() && needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
    return self;
}

at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &dst) {
    if (!dst.sizes().equals(self.sizes())) resize_sim(dst, self.sizes(), std::nullopt);
    return copy_from(self, dst, false);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor reshape_alias(const at::Tensor &self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

at::Scalar local_scalar(const at::Tensor &self) {
    current().synchronize();
    return as_host(self).item();
}

at::Tensor &set_all(at::Tensor &self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(source);
    impl->set_sizes_and_strides(size, stride, offset);
    return self;
}

at::Tensor &set_storage_only(at::Tensor &self, at::Storage source) {
    return set_all(self, source, 0, {int64_t(source.nbytes() / self.dtype().itemsize())}, {1});
}

void record_stream(at::Tensor &, at::Stream) {}

void on_the_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    current().synchronize();
    at::native::cpu_fallback(op, stack);
}

// A kernel that takes its time: what follows it on the same stream must wait, and nothing else does.
at::Tensor &slow_fill(at::Tensor &self, double value, int64_t ms) {
    at::Tensor tensor = self;
    current().put([tensor, value, ms] {
        std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        at::NoGradGuard no_grad;
        as_host(tensor).fill_(value);
    });
    return self;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("resize_", resize_sim);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("set_.source_Storage", set_storage_only);
    m.impl("set_.source_Storage_storage_offset", set_all);
    m.impl("record_stream", record_stream);
}

TORCH_LIBRARY(simulated_accelerator, m) {
    m.def("slow_fill_(Tensor(a!) self, float value, int ms) -> Tensor(a!)");
}
TORCH_LIBRARY_IMPL(simulated_accelerator, PrivateUse1, m) { m.impl("slow_fill_", slow_fill); }

}  // namespace
