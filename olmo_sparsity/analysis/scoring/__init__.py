"""Run the model: scorer.py computes losses with chosen distant tokens; the others build on it.

rows.py              which tokens a forward sees
scorer.py            losses of rows; row_groups.py: which rows share a forward; row_batch.py: one
                     forward
model_runner.py      batches that fit in memory, states of texts, −log p; tensors.py: copies to the
                     device and back
replaced.py          the same where unrelated text replaces distant text; logprobs.py: log-
                     probabilities of whole prompts
document_losses.py   L_short and L_long of all targets of a document
induction.py         does the model copy?
sink.py              does it need a prefix?
cost.py              the same interface without a model, to count token-forwards
losses_by_place.py   the loss by place of checkpoints, which checkpoints.py lists; shared_text.py:
                     the documents of all; stored_losses.py: a folder for finished ones
"""
