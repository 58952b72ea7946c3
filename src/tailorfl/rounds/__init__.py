"""The rounds: who takes part, what is sent, accepted and aggregated."""
