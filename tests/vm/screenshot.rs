//! Decodes screenshots.

use std::collections::BTreeSet;
use std::io::Cursor;

/// Returns the distinct colours of a PNG with eight bits per sample, each as the samples of a pixel.
pub(crate) fn colours(data: &[u8]) -> BTreeSet<Vec<u8>> {
    let mut reader = png::Decoder::new(Cursor::new(data)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let frame = reader.next_frame(&mut pixels).unwrap();
    assert_eq!(frame.bit_depth, png::BitDepth::Eight);
    pixels[..frame.buffer_size()].chunks(frame.color_type.samples()).map(<[u8]>::to_vec).collect()
}
