"""A round as the best plain loop and with every engine, timed, and what to set."""
