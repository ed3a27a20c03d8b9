"""Waters the pots of a greenhouse that are dry."""

import json
from pathlib import Path


class MoistureProbe:
    def __init__(self, pot, read):
        self.pot = pot
        self.read = read

    def is_dry(self):
        return self.read() < 0.25


def load_pots(path):
    settings = json.loads(Path(path).read_text())
    return settings["pots"]


def water_all(path, valves, readers, seconds=20):
    for pot in load_pots(path):
        probe = MoistureProbe(pot, readers[pot])
        if probe.is_dry():
            valves[pot].open(seconds)
