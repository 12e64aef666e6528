//! Screenshots of simulated VMs: PNGs that are valid, not blank and different for every VM.

const WIDTH: u32 = 160;
const HEIGHT: u32 = 120;

/// The maximum size of an uncompressed deflate block.
const MAX_STORED_BLOCK: usize = 0xffff;

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";
const BIT_DEPTH: u8 = 8;
const GRAYSCALE: u8 = 0;
/// The filter type of a row that is not filtered.
const NO_FILTER: u8 = 0;

/// Returns a PNG with vertical bars, whose shades are the bytes of `seed`, below white lines.
pub(super) fn screenshot(seed: u128) -> Vec<u8> {
    let shades = seed.to_be_bytes();
    let mut rows = Vec::new();
    for y in 0..HEIGHT {
        rows.push(NO_FILTER);
        rows.extend((0..WIDTH).map(|x| {
            let bar = (x as usize * shades.len()) / WIDTH as usize;
            if y % 8 == 0 { 255 } else { shades[bar] }
        }));
    }
    let mut header = [WIDTH.to_be_bytes(), HEIGHT.to_be_bytes()].concat();
    // The last three are the only compression and filter methods, and no interlacing.
    header.extend([BIT_DEPTH, GRAYSCALE, 0, 0, 0]);
    let mut png = SIGNATURE.to_vec();
    for (name, data) in [(b"IHDR", header), (b"IDAT", zlib_stored(&rows)), (b"IEND", Vec::new())] {
        let size = u32::try_from(data.len()).expect("the image is small");
        let checked = [&name[..], &data].concat();
        png.extend(size.to_be_bytes());
        png.extend(&checked);
        png.extend(crc32fast::hash(&checked).to_be_bytes());
    }
    png
}

/// Returns a zlib stream of uncompressed blocks.
fn zlib_stored(data: &[u8]) -> Vec<u8> {
    let mut stream = vec![0x78, 0x01];
    let count = data.chunks(MAX_STORED_BLOCK).count();
    for (index, block) in data.chunks(MAX_STORED_BLOCK).enumerate() {
        let size = u16::try_from(block.len()).expect("at most MAX_STORED_BLOCK");
        let is_last = index + 1 == count;
        stream.push(u8::from(is_last));
        stream.extend(size.to_le_bytes());
        stream.extend((!size).to_le_bytes());
        stream.extend(block);
    }
    stream.extend(adler32(data).to_be_bytes());
    stream
}

fn adler32(data: &[u8]) -> u32 {
    const MODULUS: u32 = 65521;
    let (a, b) = data.iter().fold((1, 0), |(a, b), byte| {
        let a = (a + u32::from(*byte)) % MODULUS;
        (a, (a + b) % MODULUS)
    });
    (b << 16) | a
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::Cursor;

    use super::*;

    #[test]
    fn screenshot_is_a_valid_png_and_not_blank() {
        let data = screenshot(0x0123_4567_89ab_cdef);
        let mut reader = png::Decoder::new(Cursor::new(data)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((frame.width, frame.height, frame.buffer_size()), (WIDTH, HEIGHT, pixels.len()));
        assert_eq!((frame.color_type, frame.bit_depth), (png::ColorType::Grayscale, png::BitDepth::Eight));
        reader.finish().unwrap();
        assert!(pixels.into_iter().collect::<BTreeSet<u8>>().len() > 4);
    }
}
