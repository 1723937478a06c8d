"""Real servers under load: what a user of them would notice."""
