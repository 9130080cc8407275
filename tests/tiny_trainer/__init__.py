"""A complete trainer in the standard library: it honours docs/trainer-contract.md in milliseconds.

The target is a table of next tokens with a hidden state for each token; the drafter is a linear model for
each slot of a block. Everything else is what a real trainer does: threads, queues, averaged gradients,
checkpoints, speculative decoding, a canary.
"""
