//! Reads pictures of screens.

use std::collections::BTreeSet;
use std::io::Read as _;

use flate2::read::ZlibDecoder;

/// The colours of a PNG with eight bits for each of three or four channels, as screens are stored.
pub(crate) fn colours(png: &[u8]) -> BTreeSet<Vec<u8>> {
    let (mark, mut rest) = png.split_at(8);
    assert_eq!(mark, b"\x89PNG\r\n\x1a\n");
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize;
    let (mut head, mut packed) = (Vec::new(), Vec::new());
    while !rest.is_empty() {
        let (size, name) = (number(rest), &rest[4..8]);
        let content = &rest[8..8 + size];
        match name {
            b"IHDR" => head = content.to_vec(),
            b"IDAT" => packed.extend_from_slice(content),
            _ => {}
        }
        rest = &rest[size + 12..];
    }
    let (width, height) = (number(&head), number(&head[4..]));
    let channels = match head[8..13] {
        [8, 2, 0, 0, 0] => 3,
        [8, 6, 0, 0, 0] => 4,
        _ => panic!("another kind of picture: {head:?}"),
    };
    let mut data = Vec::new();
    ZlibDecoder::new(packed.as_slice()).read_to_end(&mut data).unwrap();
    assert_eq!(data.len(), height * (1 + width * channels));

    let mut colours = BTreeSet::new();
    let mut above = vec![0; width * channels];
    for line in data.chunks(1 + width * channels) {
        let (filter, mut line) = (line[0], line[1..].to_vec());
        for at in 0..line.len() {
            let (left, corner) = match at.checked_sub(channels) {
                Some(before) => (line[before], above[before]),
                None => (0, 0),
            };
            let guess = match filter {
                0 => 0,
                1 => left,
                2 => above[at],
                3 => left.midpoint(above[at]),
                4 => nearest(left, above[at], corner),
                _ => panic!("another filter: {filter}"),
            };
            line[at] = line[at].wrapping_add(guess);
        }
        colours.extend(line.chunks(channels).map(<[u8]>::to_vec));
        above = line;
    }
    colours
}

/// Whichever of three neighbours is nearest to what they promise together.
fn nearest(left: u8, above: u8, corner: u8) -> u8 {
    let promise = i16::from(left) + i16::from(above) - i16::from(corner);
    let distance = |neighbour: u8| (promise - i16::from(neighbour)).abs();
    [left, above, corner].into_iter().min_by_key(|neighbour| distance(*neighbour)).unwrap()
}
