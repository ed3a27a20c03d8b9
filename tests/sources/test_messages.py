"""Logs as OpenAI's and Anthropic's APIs take them become the same sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity import Segment
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.sources.reading.chat_log import read_log
from olmo_sparsity.sources.reading.messages import blocks, read_messages
from olmo_sparsity.sources.request import AttributeRequest

SYSTEM = "# Role\nYou help.\n\n# Rules\nBe short.\n\n- no jokes"
CALL = {"id": "c1", "function": {"name": "search", "arguments": '{"q": "bridge"}'}}
OPENAI: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Hello, I am Ada."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "When did the bridge open?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "c1", "content": "It opened in 1921."},
    {"role": "assistant", "content": "It opened in 1921. It is old."},
]
ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": SYSTEM}],
    "messages": [
        {"role": "user", "content": "Hello, I am Ada."},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": "When did the bridge open?"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "bridge"}}
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "It opened in 1921."}],
                }
            ],
        },
        {"role": "assistant", "content": "It opened in 1921. It is old."},
    ],
}


LAST = [
    {
        "role": "user",
        "content": 'Use these.\n<document title="a.md">It opened in 1921.</document>\n'
        "<document>It closed.</document>\nWhen did it open?",
    },
    {"role": "assistant", "content": "It opened in 1921."},
]


@pytest.mark.parametrize(
    ("passages", "names"),
    [("document", ["a.md", "passage 2"]), (r"It \w+[^<]*", ["passage 1", "passage 2"])],
)
def test_passages_within_the_last_message_of_the_user_are_sources(
    passages: str, names: list[str]
) -> None:
    (turn,) = read_messages(LAST, passages=passages).sources
    parts = turn["content"]
    sources = [part for part in parts if isinstance(part, Segment)]
    assert [source.name for source in sources] == names
    assert [source.text for source in sources] == ["It opened in 1921.", "It closed."]
    assert parts[-1].endswith("When did it open?")
    (whole,) = read_messages(LAST).sources
    assert whole["content"] == [LAST[0]["content"]]


@pytest.mark.parametrize("passages", ["context", "("])
def test_passages_that_are_not_there_are_an_error(passages: str) -> None:
    with pytest.raises(ConfigError, match="passages"):
        read_messages(LAST, passages=passages)


@pytest.mark.parametrize("role", ["User", "tool"])
def test_passages_without_a_message_of_the_user_are_an_error(role: str) -> None:
    with pytest.raises(ConfigError, match=f"role user.*{role}"):
        read_messages([LAST[0] | {"role": role}, LAST[1]], passages="document")


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning_content": "One.\n\nTwo."},
        {"reasoning": "One.\n\nTwo."},
        {"content": [{"type": "thinking", "thinking": text} for text in ("One.", "Two.")]},
        {"content": [{"type": "reasoning", "reasoning": "One.\n\nTwo."}]},
    ],
)
def test_all_reasoning_of_an_answer_is_read(answer: dict[str, Any]) -> None:
    text = [{"type": "text", "text": "It opened in 1921."}]
    message = {"role": "assistant", "content": [*answer.pop("content", []), *text]} | answer
    read = read_messages([LAST[0], message])
    assert read.answer == "It opened in 1921."
    assert read.reasoning == "<think>\nOne.\n\nTwo.\n</think>\n\n"


@pytest.mark.parametrize(
    ("in_content", "reasoning"),
    [
        ("<think>\nOne.\n</think>\n\n", "One."),  # the same, once more
        ("<think>\n\n</think>\n\n", "One."),
        ("One.</think>", "One."),  # of a template that writes the opening tag into the prompt
        ("<think>Two.</think> ", "One.\n\nTwo."),
    ],
)
def test_reasoning_in_the_content_is_no_answer_beside_reasoning_of_its_own(
    in_content: str, reasoning: str
) -> None:
    message = {
        "role": "assistant",
        "content": f"{in_content}It opened.",
        "reasoning_content": "One.",
    }
    read = read_messages([LAST[0], message])
    assert (read.answer, read.reasoning) == ("It opened.", f"<think>\n{reasoning}\n</think>\n\n")
    with pytest.raises(ConfigError, match="without text"):
        read_messages([LAST[0], message | {"content": in_content}])


def test_each_message_before_the_answer_has_its_sources() -> None:
    contents = [message["content"] for message in read_messages(OPENAI).sources]
    assert contents == [
        [
            Segment("system: Role", "# Role\nYou help."),
            Segment("system: Rules", "# Rules\nBe short.\n\n- no jokes"),
        ],
        [Segment("user: Hello, I am Ada.", "Hello, I am Ada.")],
        ["Hello."],
        ["When did the bridge open?"],
        [],
        [Segment("tool: search", "It opened in 1921.")],
    ]


def test_the_last_message_is_the_answer() -> None:
    assert read_messages(OPENAI).answer == "It opened in 1921. It is old."


def test_messages_keep_their_roles_and_calls() -> None:
    sources = read_messages(OPENAI).sources
    roles = [message["role"] for message in sources]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool"]
    assert sources[4]["tool_calls"][0]["function"]["arguments"] == {"q": "bridge"}


@pytest.mark.parametrize("messages", [ANTHROPIC, {"messages": OPENAI, "model": "m"}])
def test_all_formats_give_the_same_sources(messages: dict[str, Any]) -> None:
    assert read_messages(messages) == read_messages(OPENAI)


def test_any_message_of_the_assistant_is_an_answer() -> None:
    read = read_messages(OPENAI, 2)
    assert (len(read.sources), read.answer) == (2, "Hello.")
    assert read.sources[1]["content"] == ["Hello, I am Ada."]  # the last that the user has said


@pytest.mark.parametrize("number", [0, 4, 9], ids=["system", "without text", "not there"])
def test_another_message_is_no_answer(number: int) -> None:
    with pytest.raises(ConfigError, match=f"message={number}"):
        read_messages(OPENAI, number)


def test_prompts_are_split_at_headings_or_at_blank_lines() -> None:
    assert blocks("a\nb\n\nc\n \nd") == ["a\nb", "c", "d"]
    assert blocks("intro\n\nmore\n## A\nx\n\ny\n# B\nz") == [
        "intro\n\nmore",
        "## A\nx\n\ny",
        "# B\nz",
    ]
    assert blocks("<rules>\na\n\nb\n</rules>\n<data>\nc\n</data>") == [
        "<rules>\na\n\nb\n</rules>",
        "<data>\nc\n</data>",
    ]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "a"}, "role"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "number 0"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "call"),
        ({"role": "assistant", "tool_calls": 3}, "tool_calls"),
        ({"role": "assistant", "content": "a", "reasoning_content": 3}, "reasoning_content=3"),
    ],
)
def test_what_is_not_a_message_is_named(message: Any, named: str) -> None:
    with pytest.raises((ConfigError, DataError), match=named):
        read_messages([message, OPENAI[-1]])


def test_logs_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps(ANTHROPIC))
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, OPENAI)) + "\n")
    one, other = (read_messages(read_log(tmp_path / f"log.{end}")) for end in ("json", "jsonl"))
    assert one == other


def test_a_log_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        read_log(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("log.json", '[{"role": "user", "content": "Who?", "content": "When?"}]', r"log\.json"),
        ("log.jsonl", '{"role": "system", "content": "a"}\n{"role": "user", "role": "tool"}',
         r"log\.jsonl:2"),
    ],
)  # fmt: skip
def test_a_key_that_a_log_has_twice_is_named(
    name: str, text: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{place}: the key '(content|role)' is there twice"):
        read_log(tmp_path / name)


def test_a_log_without_a_source_says_what_would_be_one() -> None:
    with pytest.raises(ConfigError, match="set passages to what is one"):
        AttributeRequest(model=None, messages=LAST).checked()
    assert AttributeRequest(model=None, messages=LAST, passages="document").checked().sources
