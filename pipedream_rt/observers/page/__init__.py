"""The page that shows a run: as a file (`pipedream-rt report`) and live (`pipedream-rt watch`)."""
