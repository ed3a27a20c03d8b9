"""Provide what every other package uses: errors, files, folders, locks, launches and progress.

Messages to the user:

    errors.py          errors that a user can fix, and the extras that a feature needs
    progress.py        lines on stderr
    renamed.py         names of the last release, which are still accepted

Files and folders, which several processes may write and any may be killed:

    files.py           atomic writes, bounded reads
    json_text.py       JSON as a value of a type; conform.py: the comparison with the type
    manifest.py        folders that are whole or not there, and damage of them
    work_folder.py     a folder that is filled over several starts of a command
      locks.py         one process at a time writes into it (lock_owner.py: which one)
      differences.py   the settings with which it was begun, and those of now
    retry.py           another try after an error of a network disk
    path_options.py    checks of paths that a user passes
    model_cache.py     the folder of downloaded and converted models

The process and its machine:

    launch.py          its rank, its signals, and exit codes
    devices.py         its device; gpus.py: GPUs by name
    share.py           its part of some work
    streams.py         its random numbers, by what they are for
    provenance.py      its command, commit and versions, which results store

Others: extend.py finds what users add, and drawing.py saves figures.
"""
