"""The page that shows a run: a file of `pipedream-rt report`, or live by `pipedream-rt watch`."""
