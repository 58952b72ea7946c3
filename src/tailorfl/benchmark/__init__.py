"""The time of a round as the best plain loop and with every engine, and the settings to use."""
