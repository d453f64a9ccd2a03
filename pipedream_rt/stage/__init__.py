"""What runs on a worker: inbox, weight versions, optimizer and the loop. torch and threads."""
