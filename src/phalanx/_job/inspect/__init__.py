"""Look at a running job, or at one that has ended, without taking part in it.

    stacks         `phalanx stacks`: where each rank is
    top            `phalanx top`: what each rank does, as it goes
    flight         what the flight recorders say once a job has ended
    agent_socket   the socket at which a job's agent answers these commands, and other hosts' agents

The launcher serves what is read here; nothing here starts, stops or waits for a rank. Nothing here imports torch.
"""
