// The worker of the search: it turns what a reader types into a query of Lunr, and leaves the search to the theme's worker,
// whose name is in this one's address.
//
// Lunr reads "--max-restarts" as "pages without this word", and "Ctrl-C" or "no space" as any word that begins with C or
// with "no". Here an option loses its dashes, words that say nothing are left out, and only the last word may be unfinished.
"use strict"

const QUERY = 2
const EMPTY = new Set(
  ("a about an and are as at be been by can cannot could did do does for from get had has have how i if in into is it its "
    + "just may me my no not of on or our should so than that the their then there these they this to too use using was we "
    + "what when where which who why will with without would you your").split(" "),
)

function prepare(typed) {
  const all = typed.replace(/\B(?=[A-Z][a-z])/g, " ").toLowerCase().split(/[^a-z0-9]+/).filter(Boolean)
  const telling = all.filter(word => !EMPTY.has(word))
  const words = (telling.length ? telling : all).map(word => self.lunr.stemmer(new self.lunr.Token(word)).toString())
  const last = words[words.length - 1] || ""
  return words.map(word => `${word}^1`).join(" ") + (last.length > 2 ? ` ${last}` : "")
}

// Before the theme's own listener: both get the same object.
addEventListener("message", event => {
  if (event.data.type === QUERY) event.data.data = prepare(event.data.data)
})
importScripts(`../assets/javascripts/workers/${location.search.slice(1)}`)
