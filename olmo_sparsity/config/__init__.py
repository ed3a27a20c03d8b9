"""Declare settings once, and read them from YAML files and the command line.

What settings there are:

    schema.py          how a field declares its range and its condition
    sections.py        `RunConfig`, the config of a training run, of these sections and
      text.py          those of text and of position IDs
      model.py         that of the model's shape
    windows.py         the long and the local window, which measurements and their reports share

From what a user has written to checked settings, in this order:

    run.py             `load_config`, the entry, and how configs are saved
      yaml_files.py    a file over its base, `--key=value` words, references
        installed.py   configs that are installed with the package
        yaml_dialect.py   numbers of YAML 1.2, and nothing silently lost
      build.py         dictionaries → dataclasses; each value is checked
        unknown_key.py    what a mistyped key may mean
      rules.py         rules between several settings

    command_line.py    options of a command, from a schema and docstrings
"""
