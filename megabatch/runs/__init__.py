"""What a run leaves on disk and says: its folder, checkpoints, metrics, the verdict."""
