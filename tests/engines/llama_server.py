"""Start the server example of llama-cpp-python 0.3.36, without its fault of cached prompts.

    python tests/engines/llama_server.py SERVER.py MODEL.gguf PORT

What a prompt shares with an earlier one gets no log-probabilities there, or ends its scheduler
("prompt logprob order mismatch"); so here prompts take nothing from its cache.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any


def main(source: str, model: str, port: str) -> None:
    spec = importlib.util.spec_from_file_location("llama_server_example", source)
    assert spec is not None
    assert spec.loader is not None
    # It imports the functions of vision models, which are not compiled.
    sys.modules["llama_cpp.mtmd_cpp"] = ModuleType("llama_cpp.mtmd_cpp")
    server: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = server
    spec.loader.exec_module(server)
    server.RadixTrie.longest_prefix = lambda self, tokens, *others, **named: (-1, 0)
    options = {"path": model, "alias": Path(model).stem, "n_ctx": 8192, "n_seq_max": 2}
    options |= {"n_batch": 512, "threads": 1, "threads_batch": 1}
    config = {"server": {"host": "127.0.0.1", "port": int(port)}, "model": options}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        sys.argv = ["server", "-C", file.name]
        server.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
