"""`phalanx.launch(fn)` calls a function of this process in the ranks of a job.

    the caller (a notebook, a test)              phalanx.launch: shows the ranks' output, returns their results
      └─ agent                                   like `phalanx run`, in a session of its own
           └─ zygote ─fork─▶ rank 0, 1, 2 …      each loads the payload, calls the function, writes its outcome

The caller is never forked: it may have threads, CUDA, a running event loop. Each call has a folder for its arguments
and results.

    payload     the function and its arguments as bytes, by value if the ranks cannot import them
    outcome     the result or error of a rank, written atomically
    rank        the program of a rank
    agent       the program of the agent
    call        the caller's side
"""
