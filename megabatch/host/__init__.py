"""What a process asks of its machine: files that survive a crash, scratch, signals, streams."""
