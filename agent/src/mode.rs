//! File modes as `chmod` takes them: a number, or a symbolic mode such as `u=rw,go+r`. See docs/decisions/0029.

/// The mode bits that `chmod` can change: permissions, set-user-ID, set-group-ID and sticky.
pub const PERMISSION_BITS: u32 = 0o7777;

/// The base of a numeric mode: decimal on the wire and in the API, octal for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Radix {
    Octal = 8,
    Decimal = 10,
}

/// A parsed mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileMode {
    /// May include the bits of the file type, as `st_mode` does.
    Number(u32),
    Symbolic(SymbolicMode),
}

/// A list of changes to a mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SymbolicMode(Vec<Change>);

/// One operator with its operand. A clause such as `u=r+w` has several of them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    classes: Vec<Class>,
    operator: char,
    operand: Operand,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Operand {
    /// Letters out of `rwxXst`.
    Permissions(String),
    /// The permissions that a class has, as in `g=u`.
    CopyOf(Class),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    User,
    Group,
    Other,
}

impl Class {
    const ALL: [Self; 3] = [Self::User, Self::Group, Self::Other];

    fn letter(self) -> char {
        match self {
            Self::User => 'u',
            Self::Group => 'g',
            Self::Other => 'o',
        }
    }

    fn shift(self) -> u32 {
        match self {
            Self::User => 6,
            Self::Group => 3,
            Self::Other => 0,
        }
    }

    /// The set-user-ID, set-group-ID or sticky bit.
    fn special_bit(self) -> u32 {
        match self {
            Self::User => 0o4000,
            Self::Group => 0o2000,
            Self::Other => 0o1000,
        }
    }
}

impl FileMode {
    /// Parses a mode. A text that begins with a digit is a number.
    #[must_use]
    pub fn parse(text: &str, radix: Radix) -> Option<Self> {
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            return u32::from_str_radix(text, radix as u32).ok().map(Self::Number);
        }
        SymbolicMode::parse(text).map(Self::Symbolic)
    }

    /// Returns the mode of a file that has `mode`, after this change.
    #[must_use]
    pub fn apply(&self, mode: u32, is_directory: bool) -> u32 {
        match self {
            Self::Number(number) => number & PERMISSION_BITS,
            Self::Symbolic(symbolic) => symbolic.apply(mode, is_directory),
        }
    }
}

impl SymbolicMode {
    fn parse(text: &str) -> Option<Self> {
        let mut changes = Vec::new();
        for clause in text.split(',') {
            let operators = clause.trim_start_matches(['u', 'g', 'o', 'a']);
            let who = &clause[..clause.len() - operators.len()];
            let is_affected = |class: &Class| who.is_empty() || who.contains([class.letter(), 'a']);
            let classes: Vec<_> = Class::ALL.into_iter().filter(is_affected).collect();
            let mut remaining = operators;
            if remaining.is_empty() {
                return None;
            }
            while let Some(operator) = remaining.chars().next() {
                if !is_operator(operator) {
                    return None;
                }
                let after = &remaining[1..];
                let (operand, rest) = after.split_at(after.find(is_operator).unwrap_or(after.len()));
                changes.push(Change {
                    classes: classes.clone(),
                    operator,
                    operand: Operand::parse(operand)?,
                });
                remaining = rest;
            }
        }
        Some(Self(changes))
    }

    fn apply(&self, mode: u32, is_directory: bool) -> u32 {
        self.0.iter().fold(mode & PERMISSION_BITS, |mode, change| change.apply(mode, is_directory))
    }
}

fn is_operator(character: char) -> bool {
    matches!(character, '+' | '-' | '=')
}

impl Operand {
    fn parse(text: &str) -> Option<Self> {
        if let Some(class) = Class::ALL.into_iter().find(|class| text.chars().eq([class.letter()])) {
            return Some(Self::CopyOf(class));
        }
        let is_valid = text.chars().all(|letter| "rwxXst".contains(letter));
        is_valid.then(|| Self::Permissions(text.to_owned()))
    }
}

impl Change {
    fn apply(&self, mode: u32, is_directory: bool) -> u32 {
        let (mut bits, mut mask) = (0, 0);
        for class in &self.classes {
            let (shift, special_bit) = (class.shift(), class.special_bit());
            // `=` keeps the special bits of directories, as chmod does.
            mask |= 0o7 << shift | if is_directory { 0 } else { special_bit };
            match &self.operand {
                Operand::CopyOf(source) => bits |= (mode >> source.shift() & 0o7) << shift,
                Operand::Permissions(letters) => {
                    for letter in letters.chars() {
                        bits |= match letter {
                            'r' => 0o4 << shift,
                            'w' => 0o2 << shift,
                            'x' => 0o1 << shift,
                            'X' if is_directory || mode & 0o111 != 0 => 0o1 << shift,
                            's' if *class != Class::Other => special_bit,
                            't' if *class == Class::Other => special_bit,
                            _ => 0,
                        };
                    }
                }
            }
        }
        match self.operator {
            '+' => mode | bits,
            '-' => mode & !bits,
            _ => mode & !mask | bits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str, mode: u32, is_directory: bool) -> Option<u32> {
        FileMode::parse(text, Radix::Decimal).map(|change| change.apply(mode, is_directory))
    }

    #[test]
    fn applies_numeric_and_symbolic_modes() {
        for (text, mode, expected) in [
            ("33188", 0, 0o644),
            ("ugo+r", 0o600, 0o644),
            ("a=r", 0o777, 0o444),
            ("+x", 0o644, 0o755),
            ("u=rw,go=", 0o777, 0o600),
            ("u+s,o-rwx", 0o755, 0o4750),
            ("g+X", 0o644, 0o644),
            ("g+X", 0o744, 0o754),
            ("u=rwx-w", 0o000, 0o500),
            ("g=u", 0o640, 0o660),
            ("go-w", 0o777, 0o755),
            ("u=rw,go=r", 0o000, 0o644),
            ("o=g,u+x-w", 0o640, 0o544),
        ] {
            assert_eq!(changed(text, mode, false), Some(expected), "{text}");
        }
        assert_eq!(changed("a+X", 0o600, true), Some(0o711));
        assert_eq!(changed("a=rx", 0o2770, true), Some(0o2555));
        assert_eq!(FileMode::parse("0644", Radix::Octal), Some(FileMode::Number(0o644)));
    }

    #[test]
    fn rejects_invalid_modes() {
        for text in ["", "u", "rwx", "u+q", "u=r,", "+é", "99999999999", "0o644", "+gu", "é+r", "z+r"] {
            assert_eq!(changed(text, 0o644, false), None, "{text}");
        }
    }
}
