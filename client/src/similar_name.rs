//! Names similar to one that does not exist.

/// How many letters a name has for each typo that is tolerated.
const LETTERS_PER_TYPO: usize = 4;

/// Returns the most similar name. An equal one is not a suggestion: the object exists, but not a part of it.
pub(crate) fn closest(name: &str, existing: &[String]) -> Option<String> {
    if existing.iter().any(|other| other == name) {
        return None;
    }
    let distance = |other: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let (distance, best) =
        existing.iter().map(|other| (distance(other), other)).min_by_key(|(distance, _)| *distance)?;
    let max_distance = (name.chars().count() / LETTERS_PER_TYPO).max(1);
    (distance <= max_distance).then(|| best.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_only_similar_names() {
        let existing = ["web", "database", "Proxy"].map(str::to_owned);
        assert_eq!(closest("wbe", &existing).as_deref(), Some("web"));
        assert_eq!(closest("databse", &existing).as_deref(), Some("database"));
        assert_eq!(closest("proxy", &existing).as_deref(), Some("Proxy"));
        assert_eq!(closest("web", &existing), None);
        assert_eq!(closest("mail", &existing), None);
    }
}
