"""What happened, when, and what the time went on."""
