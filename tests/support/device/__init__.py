"""A stand-in for an accelerator; `standin` is its face."""
