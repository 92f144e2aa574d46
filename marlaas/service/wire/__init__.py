"""The JSON that goes over the wire, one schema a thing, and how it is made of domain records."""
