"""Steps from one schema to the next. A step is frozen once released: it spells out its tables."""
