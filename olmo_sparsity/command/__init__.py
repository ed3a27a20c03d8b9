"""Run the commands of `olmo-sparsity`: what a user types, and a function for each command.

    cli.py                        `entry` and `main`: parse, run, exit
      arguments.py                options of all commands; attribute_arguments.py: of `attribute`
        parser.py                 what they have in common
      streams.py                  standard output and error
      ending.py                   errors → exit codes and messages

    training.py                   configs, prepare, train, export
    measure.py, explain.py, losses.py, attribute.py, experiment.py, compare.py
    results.py                    figure, report

      share.py                    the shard of the work that a process does
      gpus.py                     options that describe the GPUs of a dry run
      memory.py                   how glibc keeps freed memory
      source_files.py             the files of `attribute --source`

Each command imports the package that does its work only when it runs, so that `--help` is fast.
"""
