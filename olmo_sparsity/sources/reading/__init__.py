"""Read what a user passes: sources, the log of an agent, an answer. Nothing is encoded here.

    {"faq.md": text}, documents of a library   read_sources.py → turns with segments
    a log of chat messages                     messages.py     → sources, answer, reasoning
    Answer(text, spans)                        answer_pieces.py → statements and what is between

request.py checks and completes a request with these modules, prompt/ encodes what they return, and
gate/questions_file.py reads the lines of a questions file with them.
"""
