"""Jobs: from settings to a run, its folder, its checkpoints, resuming, extending and merging."""
