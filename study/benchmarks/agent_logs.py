"""Which blocks of five agents' logs matter to the answer: it is known, as only one holds its words.

    python -m study.benchmarks.agent_logs [smollm2]

Each log has two blocks of a system prompt and two outputs of tools. The benchmark prints
the verdicts, and for how many of the 20 blocks they are right.
"""

from __future__ import annotations

import sys
from typing import Any

from olmo_sparsity import attribute, estimate_cost, load_model


def log(
    blocks: list[str], user: str, tools: list[tuple[str, str]], answer: str
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "\n\n".join(blocks)},
        {"role": "user", "content": user},
    ]
    for i, (name, out) in enumerate(tools):
        turns.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"c{i}", "function": {"name": name, "arguments": "{}"}}],
            }
        )
        turns.append({"role": "tool", "tool_call_id": f"c{i}", "content": out})
    return [*turns, {"role": "assistant", "content": answer}]


LOGS = [
    (
        log(
            [
                "# Role\nYou help travellers in railway stations.",
                "# Office\nThe lost property office is open from 09:40 to 16:15.",
            ],
            "Which train goes to Port Ardel, and from where?",
            [
                ("timetable", '{"train": "RX 4417", "to": "Port Ardel", "platform": "12b"}'),
                ("weather", '{"place": "Port Ardel", "sky": "cloudy", "wind": "north"}'),
            ],
            "Train RX 4417 goes to Port Ardel from platform 12b.",
        ),
        {"tool: timetable"},
    ),
    (
        log(
            [
                "# Role\nYou answer questions about the garden.",
                "# Contact\nThe head gardener is Ottoline Brackwater, extension 7731.",
            ],
            "Who is the head gardener, and which extension?",
            [
                ("plants", '{"bed": 4, "plants": ["lupin", "foxglove"]}'),
                ("soil", '{"moisture": "low", "acid": "high"}'),
            ],
            "The head gardener is Ottoline Brackwater, extension 7731.",
        ),
        {"system: Contact"},
    ),
    (
        log(
            [
                "# Role\nYou look after a small library.",
                "# Fees\nA lost book costs the price of a new one.",
            ],
            "Where is the book on bees?",
            [
                ("catalogue", '{"title": "On Bees", "shelf": "Q-58 beside the east window"}'),
                ("loans", '{"reader": 311, "books": 2, "late": "no"}'),
            ],
            "It is on shelf Q-58 beside the east window.",
        ),
        {"tool: catalogue"},
    ),
    (
        log(
            [
                "# Role\nYou work for a bakery.",
                "# Delivery\nThe van leaves at 05:25 from the yard behind Marrow Lane.",
            ],
            "When does the van leave, and from where?",
            [("stock", '{"rye": 40, "wheat": 12}'), ("orders", '{"cafe": 30, "school": 55}')],
            "The van leaves at 05:25 from the yard behind Marrow Lane.",
        ),
        {"system: Delivery"},
    ),
    (
        log(
            [
                "# Role\nYou support a software team.",
                "# Hours\nThe team meets on weekday mornings.",
            ],
            "Why did the build fail?",
            [
                ("logs", '{"step": "link", "error": "undefined symbol zq_frobnicate_v9"}'),
                ("disk", '{"free": "211 GB", "used": "35 GB"}'),
            ],
            "The build failed because of the undefined symbol zq_frobnicate_v9.",
        ),
        {"tool: logs"},
    ),
]
DECOYS = [
    '{"city": "Lund", "people": 94000, "river": "Hoje"}',
    "# Style\nWrite in plain words and leave out greetings.",
    '{"song": "Evening", "minutes": 4, "singer": "unknown"}',
    "# Safety\nDo not open the cabinet while the lamp is red.",
    '{"bird": "wren", "eggs": 6, "nest": "hedge"}',
    "# Storage\nKeep boxes dry and away from the stove.",
    '{"team": "blue", "points": 17, "rank": "third"}',
    "# Visitors\nVisitors sign the book at the front desk first.",
    '{"paper": "A3", "sheets": 250, "colour": "cream"}',
    "# Payment\nPay by card or with coins at the machine.",
]


def main(name: str = "smollm2") -> None:
    model, right, total = load_model(name, dtype="bf16"), 0, 0
    for number, (messages, true) in enumerate(LOGS, start=1):
        cost = estimate_cost(attribute, model, messages=messages, decoys=DECOYS)
        found = attribute(model, messages=messages, decoys=DECOYS)
        for row in found.sources.itertuples():
            is_right = bool(row.statements) == (row.source in true)
            right, total = right + is_right, total + 1
            print(f"log {number}, {row.source}: {row.verdict}{'' if is_right else ' (WRONG)'}")
        print(f"  {found.token_forwards:,} token-forwards; {cost.token_forwards:,} were counted")
    print(f"{right} of {total} verdicts are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
