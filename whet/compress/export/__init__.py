"""`whet export`: a model in the formats of other programs, each checked in that program."""
