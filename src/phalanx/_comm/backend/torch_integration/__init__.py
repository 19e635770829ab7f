"""This package makes every change that Phalanx makes to PyTorch, one file for each subject; no other package does.

A program that does not ask for us must see PyTorch as if Phalanx were not installed. So `import torch` only puts two
names where torch looks backends up, and the rest is applied at first use: when somebody asks for one of them by name.

    changed                              so that                                        applied when
    Backend.PHALANX, Backend.MPI         we hear that the backend is asked for          torch is imported
    Backend._plugins                     "PHALANX" is found, and not listed before     torch is imported
    init_process_group without a name    it means ours under `phalanx run`              in a rank of `phalanx run`
    init_process_group, a name of none   the error says which backends there are        in a rank of `phalanx run`
    env://                               it needs no port under `phalanx run`           in a rank of `phalanx run`
    FileStore's queues                   it has them, being the store of `phalanx run`  in a rank of `phalanx run`
    FileStore's append, delete, errors   they are TCPStore's, as the store is chosen by us  in a rank of `phalanx run`
    PrefixStore's queues, list of keys   it passes them on to a store in Python         as the two above, or for a group
    env://, tcp://                       they work under mpiexec, and say who is where  "phalanx" or "mpi" is asked for
    file://                              it refuses a file that no store has written    "phalanx" or "mpi" is asked for
    monitored_barrier                    it takes our groups, which torch refuses       "phalanx" or "mpi" is asked for
    _object_to_tensor, _tensor_to_object pickles between hosts carry a MAC             "phalanx" or "mpi" is asked for
    all_gather_object and its like       each pickle is valid in one call only         "phalanx" or "mpi" is asked for
    _broadcast_object of torch's ZeRO, PGTransport   their pickles carry a MAC, too    they are imported, after that
    _dist2's table of backends           its new_group("phalanx") works              `_dist2` is imported
    NanCheckHook.attach                  it is called at our operations                 a group of ours is made
    FlightRecorderHook.attach            a group begins where it can't be attached      a group of ours is made
    DDP's _pre_forward                   we warn of equal batches and epochs             a group of ours is made
    _new_process_group_helper            "mpi" makes a group of ours                    "mpi" is, and torch has no MPI
    DataLoader.__iter__                  we hear which iterator is at work              our DistributedSampler is made
    _MapDatasetFetcher.fetch             a batch has random numbers of its own          in its DataLoader's workers
    DataLoader's iterators' __next__     we hear when a batch was asked for, and came   a run report is asked for
    autograd.backward                    we hear when it begins and ends                a run report is asked for
    torch._C._collect_all                it fails with the first of our calls that does a worker of `phalanx.rpc` starts

    changed                              goes when torch (seen: 2.13)
    Backend.PHALANX, Backend.MPI         tells a backend that it is asked for, and compares names of groups in one case
    Backend._plugins                     compares names of groups in one case
    init_process_group without a name    lets the environment say which backend is the default
    init_process_group, a name of none   says more than "Unknown backend type"
    env://, in a rank of `phalanx run`   takes a FileStore from its launcher
    FileStore's and PrefixStore's        has queues in FileStore, and passes them on from PrefixStore
    FileStore's append, delete, errors   does there what its TCPStore does
    env://, tcp://                       tells a rendezvous handler for which backend it is called
    file://                              ends its waiting in a foreign file at the timeout
    monitored_barrier                    asks the group instead of its name
    _object_to_tensor and the like       authenticates the objects that its collectives send
    _broadcast_object, PGTransport       sends no pickles in plain tensors
    _dist2's table of backends           reads the backends that were registered with `Backend.register_backend`
    NanCheckHook.attach                  calls hooks of groups that are written in Python
    FlightRecorderHook.attach            goes on without a recorder where it has no name for a group
    DDP's _pre_forward                   has hooks that it does not pickle or copy
    _new_process_group_helper            takes "mpi" from `Backend.register_backend`
    DataLoader.__iter__                  tells how many batches it has handed to the loop
    _MapDatasetFetcher.fetch             can seed each batch, and not only each worker
    __next__, autograd.backward          has hooks there, as optimizers have
    torch._C._collect_all                lets Python give a Future an error that C++ sees

(`csrc/interpose.c` reaches deeper, into libc10's allocation, when DDP asks for gradients in shared memory; and
`process_group/observed.py` adds kernels to c10d's operators once a mode of the dispatcher looks on at a call of ours.
The page docs/explanation/architecture.md explains both decisions.)
"""
