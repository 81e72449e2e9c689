"""A set-up for production: what each host gets, and what is to be typed there."""
