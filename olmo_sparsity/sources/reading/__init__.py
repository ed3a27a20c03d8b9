"""Read what a user passes: sources, the log of an agent, an answer. Nothing is encoded here.

    {"faq.md": text}         read_sources.py    → turns with segments (prompt_parts.py)
      documents of a library library_documents.py
    a log of chat messages   chat_log.py        → messages in one form
                             messages.py        → sources, answer, reasoning
      passages of the user   passages.py
    Answer(text, spans)      answer_pieces.py   → statements and what is between
    what a model generated   reasoning.py       → its reasoning, in sentences
    any text                 surrogates.py      refuses what no tokenizer takes

request.py checks and completes a request with these modules, prompt/ encodes what they return, and
gate/questions_file.py reads the lines of a questions file with them.
"""
