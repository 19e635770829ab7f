"""Start a job on several hosts from one terminal: `phalanx run --hosts a,b train.py`.

    this terminal                                      each host
      SshJob ── SshConnection ── ssh a ═══════════ sshd ── Session ── the agent, as `phalanx run` there
             ── SshConnection ── ssh b ═══════════ sshd ── Session ── the agent

    host_list    the hosts of --hosts and --hostfile
    request      the message to every host: command line, working directory, environment variables
    pipes        messages over ssh's stdin and stdout, after any output of the login shell
    facts        what a host reports about itself before anything starts
    check        the problems of all hosts in one table, and the address that all hosts can reach
    connection   one ssh process and its host
    job          runs the job, from the first ssh process to the exit code
    session      the host's end of a connection (`python -m phalanx._job.ssh`); with --detach it survives the connection
    remote_command   the ssh command that runs Python, or a `phalanx` command, on a host: `phalanx top --host a`

`SshJob` only starts the agents, like a scheduler: they are unaware of ssh. Nothing here imports torch.
"""
