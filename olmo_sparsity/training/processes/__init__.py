"""Let the processes of a run meet, talk and stop together.

    distributed.py          `Processes`: messages, and an error of one that stops all
    process_group.py        `connect`: makes the groups for messages and for tensors
      meeting.py            where all meet before, and who did not come
      network_interface.py  the network of a node by which it reaches the others
      all_reduce.py         how fast that network is (a command of slurm/accept.sbatch)
    device.py               the device of each process, and its precision
    watchdog.py             ends a run in which a process hangs; stacks.py: which one
    stop_signals.py         signals ask to save and stop

All of training is given a `Processes`, also a run of one process, which sends nothing.
"""
