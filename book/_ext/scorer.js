// How search results rank in this book: a term of the glossary first (it is an index
// entry, 100), then a chapter or section whose whole title was asked for, then the rest.
var Scorer = {
  title: 15,
  partialTitle: 7,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  term: 5,
  partialTerm: 2,

  score: ([page, title, anchor, description, score]) => {
    const plain = (text) => text.trim().replace(/\?$/, "").toLowerCase();
    const asked = new URLSearchParams(window.location.search).get("q") ?? "";
    const heading = title.replace(/<[^>]*>/g, "").split(" > ").pop();
    const words = heading.replace(/^[\d.]+\s+/, "");
    return plain(words) === plain(asked) ? score + 50 : score;
  },
};
