//! Which start of a guest it is.

/// How far the time of one boot may seem to move: the guest's clock is set while it runs.
const SAME: f64 = 60.0;

#[derive(Debug, Default)]
pub(super) struct Boot {
    text: Option<String>,
    /// When it booted, as an agent said that has no better way to tell boots apart.
    time: Option<f64>,
    /// How many boots looked like the one before.
    alike: u64,
    over: bool,
}

impl Boot {
    /// The guest's run ended: what comes next is another one.
    pub(super) fn end(&mut self) {
        self.over = true;
    }

    /// Takes what an agent says, `started` if it says that it has just started, and answers which boot that is.
    pub(super) fn hear(&mut self, id: Option<String>, time: Option<f64>, started: bool) -> Option<String> {
        if let Some(id) = id {
            (self.text, self.time, self.over) = (Some(id), None, false);
            return self.text.clone();
        }
        let Some(time) = time else { return self.text.clone() };
        let same = self.time.is_some_and(|before| (time - before).abs() <= SAME) && !started && !self.over;
        if !same {
            let text = format!("{time:.0}");
            let seen = self.text.as_ref().is_some_and(|old| old.split('+').next() == Some(text.as_str()));
            if seen {
                self.alike += 1;
            }
            self.text = Some(if seen { format!("{text}+{}", self.alike) } else { text });
            (self.time, self.over) = (Some(time), false);
        }
        self.text.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boots_are_told_apart_by_their_ids() {
        let mut boot = Boot::default();
        let mut hear = |id: &str, started| boot.hear(Some(id.into()), Some(1.0), started).unwrap();
        assert_eq!(
            (hear("a", true), hear("a", false), hear("a", true)),
            ("a".into(), "a".into(), "a".into())
        );
        assert_eq!(hear("b", false), "b");
    }

    #[test]
    fn boots_are_told_apart_by_their_times_where_there_is_nothing_better() {
        let mut boot = Boot::default();
        assert_eq!(boot.hear(None, None, false), None);
        let first = boot.hear(None, Some(1000.0), true).unwrap();
        assert_eq!(first, "1000");
        // Its clock was set.
        assert_eq!(boot.hear(None, Some(1050.0), false).unwrap(), first);
        assert_eq!(boot.hear(None, None, false).unwrap(), first);
        assert_eq!(boot.hear(None, Some(1061.0), false).unwrap(), "1061");
        // Another agent, which knows nothing of what the other did.
        let second = boot.hear(None, Some(1061.0), true).unwrap();
        assert_eq!(second, "1061+1");
        assert_eq!(boot.hear(None, Some(1061.0), false).unwrap(), second);
        boot.end();
        let third = boot.hear(None, Some(1061.0), false).unwrap();
        assert_eq!(third, "1061+2");
        assert_eq!(boot.hear(None, Some(1061.0), false).unwrap(), third);
    }
}
