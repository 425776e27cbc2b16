"""A trained model made smaller, and handed to other programs."""
