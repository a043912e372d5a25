"""How a rank that waits learns that another has failed, went silent, or will never come."""
