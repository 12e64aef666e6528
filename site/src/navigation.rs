//! The navigation of the site: the links of `docs/index.md`, by the section that they are in.

use pulldown_cmark::HeadingLevel;

use crate::markdown::{Target, render};
use crate::sources::SOURCES;

/// The page that all others are linked from.
pub(crate) const INDEX: &str = "docs/index.md";

/// The pages in their order.
#[derive(Debug)]
pub(crate) struct Navigation {
    pub(crate) sections: Vec<Section>,
}

/// A section of the index.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) title: String,
    pub(crate) entries: Vec<Entry>,
}

/// A link to a page.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) title: String,
    /// The path on the site.
    pub(crate) output: String,
}

impl Navigation {
    pub(crate) fn new() -> Self {
        let mut sections: Vec<Section> = Vec::new();
        let Some(index) = SOURCES.page(INDEX) else { return Self { sections } };
        let page = render(index, &SOURCES);
        for (number, heading) in page.headings.iter().enumerate() {
            if heading.level != HeadingLevel::H2 {
                continue;
            }
            let links = page.links.iter().filter(|link| link.heading == number + 1);
            let entries = links.filter_map(|link| match &link.target {
                Target::Site { output, anchor } if anchor.is_empty() && output.ends_with(".html") => {
                    Some(Entry { title: link.text.clone(), output: output.clone() })
                }
                _ => None,
            });
            sections.push(Section { title: heading.text.clone(), entries: entries.collect() });
        }
        Self { sections }
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.sections.iter().flat_map(|section| &section.entries)
    }

    /// Returns the pages before and after one.
    pub(crate) fn neighbours(&self, output: &str) -> (Option<&Entry>, Option<&Entry>) {
        let entries: Vec<&Entry> = self.entries().collect();
        let Some(position) = entries.iter().position(|entry| entry.output == output) else {
            return (None, None);
        };
        (position.checked_sub(1).map(|before| entries[before]), entries.get(position + 1).copied())
    }
}
