// The order of search results: guides before reference pages with a similar match, and pages for contributors last.
const REFERENCE = /^docs\/(api\/|measurements|performance)/;
const CONTRIBUTORS =
  /^(CHANGELOG|CONTRIBUTING|tools\/|docs\/(api\/io_model|architecture|contract|contributors|design\/|first-change|glossary|io-complexity|paper|pipelines))/;

var Scorer = {
  score: ([page, , , , score]) => score + (CONTRIBUTORS.test(page) ? -100 : REFERENCE.test(page) ? 0 : 3),

  // Sphinx's defaults
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
