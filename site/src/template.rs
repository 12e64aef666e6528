//! The HTML around the content of a page. It has no scripts and no inline styles, so that a strict policy allows it.

use std::fmt::Write as _;

use pulldown_cmark::HeadingLevel;

use crate::markdown::{Heading, Page, escape, relative};
use crate::navigation::{Entry, Navigation};

/// Returns the document of a page.
pub(crate) fn page(page: &Page<'_>, navigation: &Navigation) -> String {
    let output = &page.source.output;
    let mut main = page.body.clone();
    main.push_str(&neighbours(output, navigation));
    document(output, &page.title, &main, &table_of_contents(&page.headings), navigation)
}

/// Returns the document for a path without a page.
pub(crate) fn not_found(path: &str, navigation: &Navigation) -> String {
    let mut main = String::from(
        "<h1>Page not found</h1>\n<p>The documentation has no page at this address. These are all pages:</p>\n",
    );
    for section in &navigation.sections {
        write!(main, "<h2>{}</h2>\n<ul>\n", escape(&section.title)).expect("a string");
        for entry in &section.entries {
            writeln!(main, "<li>{}</li>", link(path, entry, false)).expect("a string");
        }
        main.push_str("</ul>\n");
    }
    document(path, "Page not found", &main, "", navigation)
}

fn document(output: &str, title: &str, main: &str, contents: &str, navigation: &Navigation) -> String {
    let title = if title == "Muster" { "Muster".to_owned() } else { format!("{} · Muster", escape(title)) };
    let (style, index) = (relative(output, "style.css"), relative(output, "index.html"));
    let version = env!("CARGO_PKG_VERSION");
    let sidebar = sidebar(output, navigation);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <link rel=\"stylesheet\" href=\"{style}\">\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#content\">Skip to the content</a>\n\
         <header><a class=\"home\" href=\"{index}\">Muster</a> <span class=\"version\">{version}</span> \
         <a class=\"menu\" href=\"#navigation\">Menu</a></header>\n\
         <div class=\"columns\">\n<main id=\"content\" tabindex=\"-1\">\n{main}</main>\n{contents}{sidebar}</div>\n</body>\n</html>\n"
    )
}

fn sidebar(output: &str, navigation: &Navigation) -> String {
    let mut html = String::from("<nav id=\"navigation\" class=\"sidebar\" aria-label=\"Pages\">\n");
    for section in &navigation.sections {
        write!(html, "<p class=\"section\">{}</p>\n<ul>\n", escape(&section.title)).expect("a string");
        for entry in &section.entries {
            writeln!(html, "<li>{}</li>", link(output, entry, entry.output == output)).expect("a string");
        }
        html.push_str("</ul>\n");
    }
    html.push_str("</nav>\n");
    html
}

fn link(from: &str, entry: &Entry, is_current: bool) -> String {
    let current = if is_current { " aria-current=\"page\"" } else { "" };
    format!("<a href=\"{}\"{current}>{}</a>", relative(from, &entry.output), escape(&entry.title))
}

fn table_of_contents(headings: &[Heading]) -> String {
    let listed: Vec<&Heading> = headings
        .iter()
        .filter(|heading| matches!(heading.level, HeadingLevel::H2 | HeadingLevel::H3))
        .collect();
    if listed.len() < 2 {
        return String::new();
    }
    let mut html = String::from(
        "<nav class=\"contents\" aria-label=\"On this page\">\n<p class=\"section\">On this page</p>\n<ul>\n",
    );
    for Heading { level, id, text } in listed {
        writeln!(html, "<li class=\"{level}\"><a href=\"#{id}\">{}</a></li>", escape(text))
            .expect("a string");
    }
    html.push_str("</ul>\n</nav>\n");
    html
}

fn neighbours(output: &str, navigation: &Navigation) -> String {
    let (before, after) = navigation.neighbours(output);
    let links = [("Previous: ", before), ("Next: ", after)];
    let links = links.iter().filter_map(|(label, entry)| Some((label, (*entry)?)));
    let html: String =
        links.map(|(label, entry)| format!("<span>{label}{}</span>\n", link(output, entry, false))).collect();
    if html.is_empty() {
        html
    } else {
        format!("<nav class=\"neighbours\" aria-label=\"Neighbouring pages\">\n{html}</nav>\n")
    }
}
