"""What a run did, as spans: recorded, kept in files, drawn, summed up. Pure."""
