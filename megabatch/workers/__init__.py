"""Who a worker is, where all of them meet, and what its process is set to."""
