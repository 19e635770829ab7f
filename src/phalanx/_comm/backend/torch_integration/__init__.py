"""This package makes Phalanx's changes to PyTorch, one file per subject; only the two named at the end are elsewhere.

A program that does not use our backend must see PyTorch as if Phalanx were not installed. So `import torch` only
registers two names in torch's tables of backends. Everything else is applied when a program first needs it.

    changed                              effect                                         applied when
    Backend.PHALANX, Backend.MPI         we notice that the backend is requested        torch is imported
    Backend._plugins                     "PHALANX" is found, but not listed before      torch is imported
    init_process_group without a name    the default is ours under `phalanx run`        in a rank of `phalanx run`
    init_process_group, unknown name     the error lists the backends                   in a rank of `phalanx run`
    env://                               it needs no port under `phalanx run`           in a rank of `phalanx run`
    FileStore's append, delete, errors   they work as TCPStore's, which users expect    in a rank of `phalanx run`
    PrefixStore's queues, list of keys   it forwards them to a store in Python          as above, or for a group
    env://, tcp://                       they work under mpiexec, with better errors    "phalanx" or "mpi" is requested
    file://                              it refuses files that no store has written     "phalanx" or "mpi" is requested
    monitored_barrier                    it accepts our groups                          "phalanx" or "mpi" is requested
    _object_to_tensor, _tensor_to_object pickles between hosts have a MAC               "phalanx" or "mpi" is requested
    all_gather_object and the like       each pickle is valid in one call only          "phalanx" or "mpi" is requested
    _broadcast_object of ZeRO            its pickles have a MAC, too                    its module is imported later
    PGTransport                          its pickles have a MAC, too                    its module is imported later
    NanCheckHook.attach                  our operations call it                         a group of ours is created
    FlightRecorderHook.attach            a group starts even if it cannot be attached   a group of ours is created
    _new_process_group_helper            "mpi" creates a group of ours                  "mpi", if torch has no MPI
    DataLoader.__iter__                  we know which iterator is in use               our DistributedSampler exists
    _MapDatasetFetcher.fetch             a batch has its own random numbers             in its DataLoader's workers
    DataLoader's iterators' __next__     we see when a batch is requested and arrives   a run report is requested
    autograd.backward                    we see when it starts and ends                 a run report is requested
    GradScaler.scale                     its result also has the unscaled loss          a run report is requested
    Module.load_state_dict               it waits for ranks that read the parameters    ranks share their memory
    torch._C._collect_all                it fails with the first of our failed calls    a `phalanx.rpc` worker starts

    changed                              removed when torch (seen: 2.13)
    Backend.PHALANX, Backend.MPI         notifies a requested backend, and compares names of groups in one case
    Backend._plugins                     compares names of groups in one case
    init_process_group without a name    reads the default backend from the environment
    init_process_group, unknown name     raises a better error than "Unknown backend type"
    env://, in a rank of `phalanx run`   accepts a FileStore from its launcher
    PrefixStore's queues, list of keys   forwards them to a store in Python
    FileStore's append, delete, errors   implements them in FileStore as in TCPStore
    env://, tcp://                       passes the backend to rendezvous handlers
    file://                              stops waiting in a foreign file at the timeout
    monitored_barrier                    calls the group instead of comparing its name
    _object_to_tensor and the like       authenticates the objects that its collectives send
    _broadcast_object, PGTransport       sends no pickles in plain tensors
    NanCheckHook.attach                  calls hooks of groups that are written in Python
    FlightRecorderHook.attach            continues without a recorder if a group has no name in C++
    _new_process_group_helper            accepts "mpi" from `Backend.register_backend`
    DataLoader.__iter__                  reports how many batches the loop has received
    _MapDatasetFetcher.fetch             can seed each batch, and not only each worker
    __next__, autograd.backward          has hooks there, as optimizers have
    GradScaler.scale                     has hooks there, or keeps the unscaled loss
    Module.load_state_dict               has a hook that runs before the load of any module
    torch._C._collect_all                lets Python set an error in a Future that C++ sees

Two changes are made elsewhere, for reasons that docs/explanation/architecture.md explains: `csrc/interpose.c` replaces
libc10's allocation functions when DDP requests gradients in shared memory, and `process_group/observed.py` adds kernels
to c10d's operators once a dispatch mode observes one of our calls.
"""
