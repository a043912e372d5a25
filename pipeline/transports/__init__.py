"""How do values get from one place to another? A file for each answer."""
