// What scrolls sideways takes the focus, so that arrow keys scroll it.
const scrollable = "pre > code, .md-typeset__scrollwrap";
const focusable = () => document.querySelectorAll(scrollable).forEach((wide) => (wide.tabIndex = 0));
focusable();
addEventListener("load", focusable);
