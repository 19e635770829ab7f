"""`phalanx.launch(fn)` calls a function of this process in the ranks of a job.

    the caller (a notebook, a test)              phalanx.launch: waits, shows the ranks' output, collects
      └─ agent                                   as `phalanx run`, in a session of its own
           └─ zygote ─fork─▶ rank 0, 1, 2 …      each loads the payload, calls the function, writes its outcome

The caller is never forked: it may have threads, CUDA, a running event loop. Each call has a
folder for its arguments and results.

    payload     the function and its arguments as bytes, by value where the ranks could not import them
    outcome     how a rank ended, written atomically
    rank        what runs in a rank
    agent       what runs in the agent's process
    call        the caller's side
"""
