"""Watering of a greenhouse: what the sensors say, and which valves open."""

import json
import time
from pathlib import Path

DRY = 0.25
LONGEST_WATERING_S = 90


class MoistureProbe:
    """A sensor in a pot; its reading is a number from 0 (dust) to 1 (mud)."""

    def __init__(self, pot, read):
        self.pot = pot
        self.read = read

    def needs_water(self):
        return self.read() < DRY


def load_settings(path):
    settings = json.loads(Path(path).read_text())
    for name in ("valves", "pots"):
        if name not in settings:
            raise ValueError(f"{path} does not name the {name}")
    return settings


def open_valve(valve, seconds):
    if seconds > LONGEST_WATERING_S:
        raise ValueError(f"{seconds} s of water would flood the bench")
    valve.open()
    try:
        time.sleep(seconds)
    finally:
        valve.close()


def water_all(probes, valves, seconds=20):
    watered = []
    for probe in probes:
        if probe.needs_water():
            open_valve(valves[probe.pot], seconds)
            watered.append(probe.pot)
    return watered


def main(path, valves, readers):
    settings = load_settings(path)
    probes = [MoistureProbe(pot, readers[pot]) for pot in settings["pots"]]
    return water_all(probes, valves)
