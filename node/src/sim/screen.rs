//! The screen of a simulated machine: a picture that is a PNG and not blank.

/// In pixels.
const WIDTH: u32 = 160;
const HEIGHT: u32 = 120;

/// The largest part that deflate takes as it is.
const STORED: usize = 0xffff;

/// Bars whose shades tell one machine from another.
pub(super) fn picture(seed: u128) -> Vec<u8> {
    let shades = seed.to_be_bytes();
    let mut rows = Vec::new();
    for y in 0..HEIGHT {
        // Each row begins with the name of its filter: none.
        rows.push(0);
        rows.extend((0..WIDTH).map(|x| {
            let bar = (x as usize * shades.len()) / WIDTH as usize;
            if y % 8 == 0 { 255 } else { shades[bar] }
        }));
    }
    let mut header = [WIDTH.to_be_bytes(), HEIGHT.to_be_bytes()].concat();
    // Eight bits for each pixel, shades of grey, the usual compression and filters, not interlaced.
    header.extend([8, 0, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, data) in [(b"IHDR", header), (b"IDAT", stored(&rows)), (b"IEND", Vec::new())] {
        let size = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let named = [&name[..], &data].concat();
        png.extend(size.to_be_bytes());
        png.extend(&named);
        png.extend(crc32fast::hash(&named).to_be_bytes());
    }
    png
}

/// A zlib stream that does not compress.
fn stored(data: &[u8]) -> Vec<u8> {
    let mut stream = vec![0x78, 0x01];
    let parts = data.chunks(STORED).count();
    for (number, part) in data.chunks(STORED).enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "not longer than STORED")]
        let size = part.len() as u16;
        stream.push(u8::from(number + 1 == parts));
        stream.extend(size.to_le_bytes());
        stream.extend((!size).to_le_bytes());
        stream.extend(part);
    }
    let (a, b) = data.iter().fold((1u32, 0u32), |(a, b), byte| {
        let a = (a + u32::from(*byte)) % 65521;
        (a, (a + b) % 65521)
    });
    stream.extend(((b << 16) | a).to_be_bytes());
    stream
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn others_read_the_picture_and_it_is_not_blank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("screen.png");
        std::fs::write(&path, picture(0x0123_4567_89ab_cdef)).unwrap();
        // zlib and crc32 of another hand; no picture library is needed to take a PNG apart.
        let script = "
import sys, zlib, struct
data = open(sys.argv[1], 'rb').read()
assert data[:8] == b'\\x89PNG\\r\\n\\x1a\\n'
at, chunks = 8, {}
while at < len(data):
    size, = struct.unpack('>I', data[at:at + 4])
    name, body = data[at + 4:at + 8], data[at + 8:at + 8 + size]
    assert struct.unpack('>I', data[at + 8 + size:at + 12 + size])[0] == zlib.crc32(name + body)
    chunks[name] = body
    at += 12 + size
width, height, depth, kind = struct.unpack('>IIBB', chunks[b'IHDR'][:10])
rows = zlib.decompress(chunks[b'IDAT'])
assert len(rows) == (width + 1) * height and (depth, kind) == (8, 0)
print(width, height, len(set(rows)))
";
        let Ok(output) = Command::new("python3").args(["-c", script]).arg(&path).output() else {
            return muster_testing::skipped("python3");
        };
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let numbers: Vec<u32> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
        assert_eq!(numbers[..2], [WIDTH, HEIGHT]);
        assert!(numbers[2] > 4, "{said}");
    }
}
