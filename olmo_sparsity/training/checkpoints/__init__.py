"""Save checkpoints while training goes on, and go on from the newest intact one.

To save, in each interval:

    save_steps.py    after which steps
    replicas.py      do all copies of the weights agree?
    writer.py        `CheckpointWriter`: threads write while the next steps are taken
    save.py          one checkpoint, from a temporary folder to its final name
    expendable.py    which checkpoint is deleted if the disk is full

To go on, once in each start:

    resume.py        chooses the checkpoint, and verifies its files; ../restore.py reads it

after_step/save.py copies what is saved, run_folder/trainer_state.py has the state besides weights
and moments, and optimizer/moments.py the format of the moments.
"""
