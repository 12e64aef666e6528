//! Permissions as hosts write them: a number, or words such as `u=rw,go+r`.

/// The bits that can be set: permissions, and those of users, groups and shared folders.
pub const BITS: u32 = 0o7777;

/// The permissions that the words make of these ones, or nothing if they are no such words.
#[must_use]
pub fn changed(words: &str, mode: u32, is_folder: bool) -> Option<u32> {
    if !words.is_empty() && words.bytes().all(|byte| byte.is_ascii_digit()) {
        // Decimal, as every number on the wire.
        return words.parse::<u32>().ok().map(|mode| mode & BITS);
    }
    let mut mode = mode & BITS;
    for clause in words.split(',') {
        let who = clause.bytes().take_while(|byte| b"ugoa".contains(byte)).count();
        let (who, mut rest) = clause.split_at(who);
        if rest.is_empty() {
            return None;
        }
        let is_meant = |class: char| who.is_empty() || who.contains([class, 'a']);
        while let Some(action) = rest.chars().next() {
            if !"+-=".contains(action) {
                return None;
            }
            let length = rest[1..].bytes().take_while(|byte| b"rwxXst".contains(byte)).count();
            let (letters, after) = rest[1..].split_at(length);
            rest = after;
            let (mut bits, mut mask) = (0, 0);
            for (class, shift, special) in [('u', 6, 0o4000), ('g', 3, 0o2000), ('o', 0, 0o1000)] {
                if !is_meant(class) {
                    continue;
                }
                // Setting permissions leaves what a folder passes on to its files.
                mask |= 0o7 << shift | if is_folder { 0 } else { special };
                for letter in letters.chars() {
                    bits |= match letter {
                        'r' => 0o4 << shift,
                        'w' => 0o2 << shift,
                        'x' => 0o1 << shift,
                        'X' if is_folder || mode & 0o111 != 0 => 0o1 << shift,
                        's' if class != 'o' => special,
                        't' if class == 'o' => special,
                        _ => 0,
                    };
                }
            }
            mode = match action {
                '+' => mode | bits,
                '-' => mode & !bits,
                _ => mode & !mask | bits,
            };
        }
    }
    Some(mode)
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn numbers_and_words_change_permissions() {
        for (words, mode, wanted) in [
            ("33188", 0, 0o644),
            ("ugo+r", 0o600, 0o644),
            ("a=r", 0o777, 0o444),
            ("+x", 0o644, 0o755),
            ("u=rw,go=", 0o777, 0o600),
            ("u+s,o-rwx", 0o755, 0o4750),
            ("g+X", 0o644, 0o644),
            ("g+X", 0o744, 0o754),
            ("u=rwx-w", 0o000, 0o500),
        ] {
            assert_eq!(changed(words, mode, false), Some(wanted), "{words}");
        }
        assert_eq!(changed("a+X", 0o600, true), Some(0o711));
        for words in ["", "u", "rwx", "u+q", "u=r,", "+é", "99999999999"] {
            assert_eq!(changed(words, 0o644, false), None, "{words}");
        }
    }
}
